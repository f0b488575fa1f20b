"""The gRPC server, the actor that runs the core, and the outgoing queues of sessions."""
