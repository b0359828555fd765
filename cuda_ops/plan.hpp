// plan.hpp: where each part of a segment, each column of a step and of a frame lies. Offsets follow
// from the sizes alone, so every process computes the same ones; nothing shared is a pointer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "layout.h"

// What kernels call too.
#ifdef __CUDACC__
#define TP_BOTH __host__ __device__
#else
#define TP_BOTH
#endif

namespace tp {

// Whether the engine saves through our writer, whose steps have generations and sequence numbers.
[[nodiscard]] constexpr bool has_writer(uint32_t source) noexcept {
  return source == TP_SOURCE_SHM || source == TP_SOURCE_CUDA_IPC;
}

[[nodiscard]] TP_BOTH constexpr uint64_t align_up(uint64_t bytes, uint64_t to) noexcept {
  return (bytes + to - 1) / to * to;
}

// Hands out aligned offsets one after another.
class Cursor {
public:
  TP_BOTH explicit constexpr Cursor(uint64_t at) noexcept : at_(at) {}
  TP_BOTH constexpr uint64_t take(uint64_t bytes, uint64_t alignment = TP_COLUMN_ALIGN) noexcept {
    at_ = align_up(at_, alignment);
    const uint64_t here = at_;
    at_ += bytes;
    return here;
  }
  [[nodiscard]] TP_BOTH constexpr uint64_t
  end(uint64_t alignment = TP_COLUMN_ALIGN) const noexcept {
    return align_up(at_, alignment);
  }

private:
  uint64_t at_;
};

// Columns of a step, as offsets from its tp_step.
struct StepColumns {
  uint64_t rows, generations, states, positions, accept_num, tokens, topk_ids, logprobs, ranks, end;

  TP_BOTH StepColumns(uint64_t n, uint64_t m, uint64_t width, uint32_t flags) noexcept {
    const bool pooling = flags & TP_STEP_POOLING;
    Cursor at(sizeof(tp_step));
    rows = at.take(4 * n);
    generations = at.take(4 * n);
    states = at.take(n);
    positions = at.take(flags & TP_STEP_POSITIONS ? 4 * n : 0);
    accept_num = at.take(flags & TP_STEP_ACCEPT ? 4 * n : 0);
    tokens = at.take(pooling ? 0 : 4 * m);
    topk_ids = at.take(pooling ? 0 : 4 * m * width);
    logprobs = at.take(4 * m * width);
    ranks = at.take(width && !pooling ? 4 * m : 0);
    end = at.end();
  }
};

// Columns of a frame, as offsets from its tp_frame.
struct FrameColumns {
  uint64_t row, generation, send_idx, token_offsets, finish_reason, first_token_ns, token_ids,
      topk_ids, topk_logprobs, ranks, draft_offsets, draft_token_ids, finals, ids, end;

  // `m` tokens; of a pooling frame m == n and only topk_logprobs is there. `drafts`: see layout.h.
  FrameColumns(uint64_t n, uint64_t m, uint64_t width, uint64_t drafts, uint64_t num_finals,
               uint64_t max_request_id_bytes, uint32_t flags) noexcept {
    const bool pooling = flags & TP_STEP_POOLING;
    Cursor at(sizeof(tp_frame));
    row = at.take(4 * n);
    generation = at.take(4 * n);
    send_idx = at.take(4 * n);
    token_offsets = at.take(4 * (n + 1));
    finish_reason = at.take(n);
    first_token_ns = at.take(8 * n);
    token_ids = at.take(pooling ? 0 : 4 * m);
    topk_ids = at.take(pooling ? 0 : 4 * m * width);
    topk_logprobs = at.take(4 * m * width);
    ranks = at.take(width && !pooling ? 4 * m : 0);
    draft_offsets = at.take(drafts ? 4 * (n + 1) : 0);
    draft_token_ids = at.take(4 * drafts);
    finals = at.take(sizeof(tp_final) * num_finals);
    ids = at.take(max_request_id_bytes * num_finals);
    end = at.end();
  }
};

// Where the message as received begins in a ring slot, behind the longest columns.
[[nodiscard]] inline uint64_t raw_offset(const tp_sizes &s) noexcept {
  const uint64_t n = s.max_num_seqs;
  const StepColumns tokens(n, n * s.max_draft_tokens, s.top_logprobs + 1,
                           TP_STEP_ACCEPT | TP_STEP_POSITIONS);
  const StepColumns pooling(n, n, s.max_pooling_floats, TP_STEP_POOLING);
  return std::max(tokens.end, pooling.end);
}

[[nodiscard]] inline uint64_t slot_bytes(const tp_sizes &s) noexcept {
  return align_up(raw_offset(s) + s.raw_bytes, TP_PAGE_BYTES);
}

[[nodiscard]] inline uint64_t rows_per_decoder(const tp_sizes &s) noexcept {
  return (uint64_t{s.max_num_seqs} + s.num_decoders - 1) / s.num_decoders;
}

// A step of prompt logprobs may belong to rows of one decoder alone: its frame must hold them all.
[[nodiscard]] inline uint64_t max_prompt_tokens(const tp_sizes &s) noexcept {
  return rows_per_decoder(s) * s.max_draft_tokens;
}

[[nodiscard]] inline uint64_t frame_bytes(const tp_sizes &s) noexcept {
  const uint64_t n = rows_per_decoder(s), m = n * s.max_draft_tokens;
  const FrameColumns tokens(n, m, s.top_logprobs + 1, m, n, s.max_request_id_bytes, 0);
  const FrameColumns pooling(n, n, s.max_pooling_floats, 0, n, s.max_request_id_bytes,
                             TP_STEP_POOLING);
  return align_up(std::max(tokens.end, pooling.end), TP_PAGE_BYTES);
}

[[nodiscard]] inline uint64_t command_bytes(const tp_sizes &s) noexcept {
  return align_up(sizeof(tp_command) + s.max_request_id_bytes + 4 * uint64_t{s.max_eos_ids},
                  TP_LINE_BYTES);
}

// Parts of the core segment.
struct CorePlan {
  uint64_t roles, ring, consumers, decoders, client, admitted, freed, marks, admissions, ids, eos,
      progress, blocks, commands, slots, frames, end;

  explicit CorePlan(const tp_sizes &s) noexcept {
    const uint64_t rows = s.max_num_seqs;
    Cursor at(sizeof(tp_header));
    roles = at.take(sizeof(tp_role) * (2 + uint64_t{s.num_decoders}), TP_LINE_BYTES);
    ring = at.take(sizeof(tp_ring), TP_LINE_BYTES);
    consumers = at.take(sizeof(tp_consumer) * s.num_decoders, TP_LINE_BYTES);
    decoders = at.take(sizeof(tp_decoder) * s.num_decoders, TP_LINE_BYTES);
    client = at.take(sizeof(tp_client), TP_LINE_BYTES);
    admitted = at.take(8 * rows, TP_LINE_BYTES);
    freed = at.take(8 * rows, TP_LINE_BYTES);
    marks = at.take(sizeof(tp_mark) * rows, TP_LINE_BYTES);
    admissions = at.take(sizeof(tp_admission) * rows, TP_LINE_BYTES);
    ids = at.take(uint64_t{s.max_request_id_bytes} * rows, TP_LINE_BYTES);
    eos = at.take(4 * uint64_t{s.max_eos_ids} * rows, TP_LINE_BYTES);
    progress = at.take(2 * sizeof(tp_progress) * rows, TP_LINE_BYTES);
    blocks = at.take(sizeof(tp_block) * s.num_blocks, TP_LINE_BYTES);
    commands = at.take(command_bytes(s) * s.command_slots, TP_LINE_BYTES);
    slots = at.take(slot_bytes(s) * s.ring_slots, TP_PAGE_BYTES);
    frames = at.take(frame_bytes(s) * s.output_slots * s.num_decoders, TP_PAGE_BYTES);
    end = at.end(TP_PAGE_BYTES);
  }
};

// Parts of the source segment.
struct SourcePlan {
  uint64_t control, exported, slots, end;

  explicit SourcePlan(const tp_sizes &s) noexcept {
    Cursor at(sizeof(tp_source));
    control = at.take(8 * uint64_t{s.max_num_seqs}, TP_LINE_BYTES);
    exported =
        at.take(sizeof(tp_export) + uint64_t{TP_IPC_HANDLE_BYTES} * s.source_slots, TP_LINE_BYTES);
    slots = at.take(slot_bytes(s) * s.source_slots, TP_PAGE_BYTES);
    end = at.end(TP_PAGE_BYTES);
  }
};

// The mapped core segment as typed parts.
class Core {
public:
  Core(void *base, const tp_sizes &sizes) noexcept
      : base_(static_cast<uint8_t *>(base)), sizes(sizes), plan(sizes),
        slot_size(slot_bytes(sizes)), frame_size(frame_bytes(sizes)),
        command_size(command_bytes(sizes)) {}

  [[nodiscard]] tp_header &header() const noexcept { return at<tp_header>(0); }
  [[nodiscard]] tp_role &role(uint64_t i) const noexcept { return (&at<tp_role>(plan.roles))[i]; }
  [[nodiscard]] tp_ring &ring() const noexcept { return at<tp_ring>(plan.ring); }
  [[nodiscard]] tp_consumer &consumer(uint64_t k) const noexcept {
    return (&at<tp_consumer>(plan.consumers))[k];
  }
  [[nodiscard]] tp_decoder &decoder(uint64_t k) const noexcept {
    return (&at<tp_decoder>(plan.decoders))[k];
  }
  [[nodiscard]] tp_client &client() const noexcept { return at<tp_client>(plan.client); }
  [[nodiscard]] uint64_t &admitted(uint64_t row) const noexcept {
    return (&at<uint64_t>(plan.admitted))[row];
  }
  [[nodiscard]] uint64_t &freed(uint64_t row) const noexcept {
    return (&at<uint64_t>(plan.freed))[row];
  }
  [[nodiscard]] tp_mark &mark(uint64_t row) const noexcept {
    return (&at<tp_mark>(plan.marks))[row];
  }
  [[nodiscard]] tp_admission &admission(uint64_t row) const noexcept {
    return (&at<tp_admission>(plan.admissions))[row];
  }
  [[nodiscard]] char *id(uint64_t row) const noexcept {
    return &at<char>(plan.ids + row * sizes.max_request_id_bytes);
  }
  [[nodiscard]] int32_t *eos(uint64_t row) const noexcept {
    return &at<int32_t>(plan.eos + row * sizes.max_eos_ids * 4);
  }
  [[nodiscard]] tp_progress &progress(uint64_t copy, uint64_t row) const noexcept {
    return (&at<tp_progress>(plan.progress))[copy * sizes.max_num_seqs + row];
  }
  [[nodiscard]] tp_block &block(uint64_t i) const noexcept {
    return (&at<tp_block>(plan.blocks))[i];
  }
  [[nodiscard]] tp_command &command(uint64_t i) const noexcept {
    return at<tp_command>(plan.commands + i * command_size);
  }
  [[nodiscard]] char *command_id(uint64_t i) const noexcept {
    return &at<char>(plan.commands + i * command_size + sizeof(tp_command));
  }
  [[nodiscard]] int32_t *command_eos(uint64_t i) const noexcept {
    return &at<int32_t>(plan.commands + i * command_size + sizeof(tp_command) +
                        sizes.max_request_id_bytes);
  }
  [[nodiscard]] tp_step &slot(uint64_t sequence) const noexcept {
    return at<tp_step>(plan.slots + (sequence & (sizes.ring_slots - 1)) * slot_size);
  }
  [[nodiscard]] uint64_t frame_offset(uint64_t k, uint64_t number) const noexcept {
    return plan.frames +
           (k * sizes.output_slots + (number & (sizes.output_slots - 1))) * frame_size;
  }
  [[nodiscard]] tp_frame &frame(uint64_t k, uint64_t number) const noexcept {
    return at<tp_frame>(frame_offset(k, number));
  }
  template <class T> [[nodiscard]] T &at(uint64_t offset) const noexcept {
    return *reinterpret_cast<T *>(base_ + offset);
  }

private:
  uint8_t *base_;

public:
  const tp_sizes sizes;
  const CorePlan plan;
  const uint64_t slot_size, frame_size, command_size;
};

// The mapped source segment as typed parts.
class SourceMap {
public:
  SourceMap(void *base, const tp_sizes &sizes) noexcept
      : base_(static_cast<uint8_t *>(base)), sizes(sizes), plan(sizes),
        slot_size(slot_bytes(sizes)) {}

  [[nodiscard]] tp_source &head() const noexcept { return *reinterpret_cast<tp_source *>(base_); }
  [[nodiscard]] tp_export &exported() const noexcept {
    return *reinterpret_cast<tp_export *>(base_ + plan.exported);
  }
  // The handle of the event of slot i.
  [[nodiscard]] uint8_t *exported_event(uint64_t i) const noexcept {
    return base_ + plan.exported + sizeof(tp_export) + i * TP_IPC_HANDLE_BYTES;
  }
  [[nodiscard]] uint64_t &control(uint64_t row) const noexcept {
    return reinterpret_cast<uint64_t *>(base_ + plan.control)[row];
  }
  [[nodiscard]] tp_step &slot(uint64_t sequence) const noexcept {
    return *reinterpret_cast<tp_step *>(base_ + plan.slots +
                                        (sequence & (sizes.source_slots - 1)) * slot_size);
  }

private:
  uint8_t *base_;

public:
  const tp_sizes sizes;
  const SourcePlan plan;
  const uint64_t slot_size;
};

// A column of the record at `head`.
template <class T, class Head>
[[nodiscard]] TP_BOTH T *column(Head &head, uint64_t offset) noexcept {
  return reinterpret_cast<T *>(reinterpret_cast<uint8_t *>(&head) + offset);
}
template <class T, class Head>
[[nodiscard]] TP_BOTH const T *column(const Head &head, uint64_t offset) noexcept {
  return reinterpret_cast<const T *>(reinterpret_cast<const uint8_t *>(&head) + offset);
}

} // namespace tp
