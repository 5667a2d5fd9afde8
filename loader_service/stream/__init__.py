"""The data plane: chunks, messages, transports, and the streamer that reads and sends."""
