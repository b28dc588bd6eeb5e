"""What Django needs to serve the shop of shop.py. In the server process alone: Django is set up once a process."""
