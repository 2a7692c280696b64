"""The control plane over N devices: one Executor, one Worker per device."""
