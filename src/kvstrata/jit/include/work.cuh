// The work list of a decode step: what worklist.cu writes, decode.cu reads and combine.cu looks up.
//
// A stage is up to 64 tokens of one page. Stages stand in the order of (request, KV head, tier); those of a KV head's
// plain tier are one group, those of its other tiers the next, because rotated and plain values do not add. A chunk is
// stages starts[c] .. starts[c + 1] - 1. Both chunks and groups only ever go up along the list, so chunk + group names one
// partial result and no other.
#pragma once

struct alignas(16) Stage {
  unsigned long long page;  // its first byte
  int group;                // 2 * (request row * KV heads + head) + (is quantised)
  unsigned meta;            // tokens | tier << 8 | part of the page << 16 (rows: number of the stage in its request)
};

struct Slots {  // the partial results of a group
  int first, count;
};
