"""Real pages: find and start Chromium, keep a pool of pages, observe, act, and survive what pages do."""
