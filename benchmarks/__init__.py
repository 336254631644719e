"""Measurements as commands."""
