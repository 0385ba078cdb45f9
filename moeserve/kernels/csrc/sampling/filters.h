// Reduces an edited row to the tokens that may be drawn.
#pragma once

#include "sampling/sampling.h"

namespace moeserve {

// The row must have been scanned; `max` is its largest logit. A survivor's weight is its probability over the largest
// one. Overwrites the Scratch, including its edited row (which may be x).
Survivors filter(const float* x, int vocab, float max, const SampleParams& p, Scratch& s);

}  // namespace moeserve
