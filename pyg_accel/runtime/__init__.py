"""What everything else runs on: native libraries, stores, hooks, the report."""
