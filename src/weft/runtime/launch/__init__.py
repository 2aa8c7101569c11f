"""Starting the processes of a run, and each process's place in it."""
