"""ZeRO: what data-parallel replicas need not all keep."""
