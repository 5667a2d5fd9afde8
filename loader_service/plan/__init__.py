"""Cutting a checkpoint for tensor parallelism: from config and catalog to slices. No I/O."""
