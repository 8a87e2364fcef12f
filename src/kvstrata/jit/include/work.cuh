// The work list of a decode step: what worklist.cu writes, decode.cu reads and combine.cu looks up.
//
// A stage is up to 64 tokens of one page. Stages stand in the order of (tier, request, KV head): those that run at the same
// time on a multiprocessor are then of one tier, and its instructions stay in the cache for them. The stages of one tier
// and KV head are a group. A chunk is stages chunks[c].at .. chunks[c + 1].at - 1. Both chunks and groups only ever go up
// along the list, so chunk + group names one partial result and no other.
#pragma once

struct alignas(16) Stage {
  unsigned long long page;  // its first byte
  int group;                // tier * units + unit; a unit is (request row, KV head)
  unsigned meta;            // tokens | tier << 8 | part of the page << 16 (rows: number of the stage in its request)
};

struct alignas(16) Chunk {
  Stage first;  // so that its page can be asked for at once
  int at, unused[3];
};

struct Slots {  // the partial results of a group
  int first, count;
};
