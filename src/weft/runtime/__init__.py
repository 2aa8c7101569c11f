"""Perform a strategy. Read `run.py`, then `modes/__init__.py`.

run.py        init() and Run: the public methods, each delegating to loop/worker_run.py or server/process.py
modes/        how a run is carried out: one contract, one file for each way
loop/         the user's optimizer, data and random numbers, and what a loop must not do
engine/       gradient buckets, exchanged beside backward
server/       parameter servers: both sides of one protocol
checks/       finite values, equal replicas, and the status message of every step
checkpoint/   saving a run and resuming it
record/       phases of a step, events, the run folder
launch/       starting processes, supervising them, and each process's place among them
"""
