"""`loaderctl`: the service at the command line."""
