"""The lab measures: an emulated cluster on one Linux machine, and the same job really run on it in several ways.

namespaces   what the kernel is asked for
keeper       the process that owns an emulated cluster; all of it goes when the keeper goes
cluster      a cluster to enter and leave: hosts, links, counters
enter        starts a command on an emulated host
peers/       PyTorch's own wrappers, to run the same job under
experiment   one contender, one seed: a run on the cluster and what was measured
request      what to compare, and on what
compare      several contenders, interleaved: `weft compare`
board        how far that is, and its rows
report       what it leaves for people to read
"""
