"""What all operations of administrators have in common, over HTTP and gRPC: roles, scopes and the audit log."""
