"""Tools around trainers: memory footprint, comparison of layouts, timelines, scaling laws."""
