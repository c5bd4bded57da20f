"""Adapters for other libraries, each optional and imported by name: importing one patches nothing."""
