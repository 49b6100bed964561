"""Plain models of trainer, rollout node, gateway and tool backend that speak exactly the messages of the contracts.

Nothing here does I/O: messages lie in queues until somebody delivers, delays or loses them, and the clock moves when
told. The invariant under test is P3: one outcome per call at its current owner; a tool that is not idempotent starts at
most once per key; NOT_STARTED only where nothing started.

The gateway's model is the specification of the takeover rules: with a ledger that survived, attach (or tombstone) where
the ledger says the call may have started; without one, tombstone every other instance and start only where no
predecessor of any instance can have run the call; else INDETERMINATE.
"""
