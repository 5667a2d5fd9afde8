"""Generated protobuf and gRPC stubs of package `loader_service.v1` (made by `make generate`)."""
