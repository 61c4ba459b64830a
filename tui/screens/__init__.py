"""The dashboard's screen and its dialogs. Dialogs are imported when first opened, to keep the first paint early."""
