"""The engine as the gateway reaches it: the gRPC service, its client, and the messages between them."""
