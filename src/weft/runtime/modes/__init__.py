"""How a run is carried out: one file for each way."""
