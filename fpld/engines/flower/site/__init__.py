"""A site of a federation: its folder and terms, its ledger, and how it answers each message."""
