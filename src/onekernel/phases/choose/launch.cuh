// What a launch is told about choosing tokens.
#pragma once

#include "abi.cuh"

// Every array begins with sequence 0; `logit_stride` of the launch is the vocabulary's size.
struct Choosing {
  u32 mode;                  // Choosing by: CHOOSE_GREEDY, and nothing below is read; CHOOSE_SCORED; CHOOSE_ROUNDS
  const Sampling* sampling;  // (SEQUENCES)
  u32* counts;               // (SEQUENCES, vocab): PROMPT_TOKEN | occurrences in the output; read with PENALISED
  const float* bias;         // (SEQUENCES, vocab); -inf bans; read with BIASED
  const u32* allowed;        // (SEQUENCES, vocab / 32 rounded up): bits; read with MASKED
  float* scores;             // (SEQUENCES, vocab): scratch; each row is written and read by its owner
  u64* words;                // (SEQUENCES, CHOICE_FIXED_WORDS + ctas * CHOICE_CTA_WORDS): zeros before the launch
  u64* reports;              // pinned (limit, SEQUENCES, REPORT_WORDS): log probabilities, each word {value, index + 1}
};
