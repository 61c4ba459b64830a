"""Widgets of the dashboard. Each draws one thing from the store that its screen hands down."""
