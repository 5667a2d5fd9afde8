"""Reading a checkpoint's metadata: safetensors headers, indexes, Hub cache snapshots."""
