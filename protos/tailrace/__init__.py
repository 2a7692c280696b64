"""Generated stubs of the public gRPC API, one package per version."""
