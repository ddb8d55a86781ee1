"""Short measurements of the links and matrix products of this host, through hocket's own communication layer."""
