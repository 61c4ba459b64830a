"""What a run stores on disk: folder, ledger, journals, machine history and saved states."""
