"""The fuzzer that measures: it grows every field of HTTP and gRPC, and weighs what that costs the gateway."""
