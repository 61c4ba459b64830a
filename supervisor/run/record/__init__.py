"""What a run keeps on disk: its folder, ledger, journals, history and saved states."""
