"""Everything that touches device memory: devices, copies and hashes, with NumPy as the reference."""
