"""Measuring servers from outside: load generation, sweeps over topologies, accuracy and token-by-token comparison."""
