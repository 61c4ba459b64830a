"""Pure drawing: from values to lines of (text, role). No widget, no colour, no clock in here; tested as text."""
