"""The coordinator: keeps track of workers and loads, and runs the streamer."""
