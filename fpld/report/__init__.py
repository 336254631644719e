"""Runs and plans as pages and figures: charts as data, drawn on a page or into files."""
