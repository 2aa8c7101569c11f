"""The lab measures: an emulated cluster on one Linux machine, and the same job really run on it in several ways.

The cluster
    cluster           a cluster as a context manager: hosts, links, counters
    cluster_process   the process that owns an emulated cluster; the cluster ends with it
    control_socket    requests to that process
    namespaces        the system calls
    exec_on_host      starts a command on an emulated host
    probe             measures the rates of links

A comparison (`weft compare`)
    spec              the contenders, the cluster and the options
    contender         a strategy or a peer, and the task that all of them run
    peers/            PyTorch's own wrappers, to run the same job under
    trial             runs one contender with one seed
    usage             the use of links and processors meanwhile, by the run and by others
    figures           the figures of that run
    rows              one row for each contender: `Row` defines its keys
    learning          how a compressor learns, as measured once
    progress          the state of a comparison that is under way
    compare           runs all contenders, interleaved
    verdict           the headline, and the remarks that limit it
    report            the HTML page, with its plots (`_plots`) and numbers in words (`words`)

The processes
    child             one process of a run of the lab
    instruments/      stragglers, sleeping compute, the profiler
"""
