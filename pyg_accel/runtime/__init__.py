"""What everything else runs on: native libraries, the machine, stores, hooks, the report."""
