"""Points that a run can be resumed from: written, verified, kept by count and by loss, found."""
