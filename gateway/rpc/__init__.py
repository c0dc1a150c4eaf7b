"""gRPC: loralane.v1, health and reflection on grpc.aio."""
