"""Three interpreters of flows, and the connections under them.

`loopback` defines the meaning of a flow, `virtual` its cost, `collective` performs it between processes. `collective`
uses `mesh` for messages between CPU processes; parameter servers use `messaging`. Both stand on `tcp` and
`selector_loop`.
"""
