"""The worker: owns one device, receives slices to it and keeps them in a `WeightStore`."""
