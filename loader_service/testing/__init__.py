"""Doubles for tests of this service and of code built on it. Servers never use them."""
