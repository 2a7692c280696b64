"""Generated stubs of `tailrace.v1`; regenerate with `make protos`."""
