"""One file per verb of the command line; each is thin: options in, one call, output."""
