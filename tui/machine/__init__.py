"""GPUs and the host: their panels on the dashboard, and the screen that shows one of them in
full.
"""
