"""The gRPC API: the services of loralane.v1, health and reflection, on grpc.aio."""
