"""One HTML file about one or several runs, from their files alone."""
