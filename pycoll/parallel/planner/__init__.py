"""What a layout costs before it runs: traces, estimates, and the search for a layout."""
