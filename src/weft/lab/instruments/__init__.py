"""How fast does a worker compute, where that is not as fast as its processor allows?

straggler    computing takes several times as long, in all steps or in a random share of them
sleep        forward, backward and the optimizer's step sleep for the durations of a profile; nothing is learnt
profiler     measures such a profile

An instrument hooks into the model before any exchange does, so that every way of distributing, PyTorch's own included,
meets the same computing. `lab/child.py` attaches instruments (`weft.runtime.loop.instruments`); the runtime knows none.
"""
