"""A stand-in for Habana's package, for tests alone: the names that its public source has, and no other."""
