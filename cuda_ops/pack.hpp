// pack.hpp: the save ops for tensors in a GPU's memory. One launch gathers a step from the engine's
// tensors into the wire layout of layout.h; pack.cu is the kernel, pack_on_cpu() the same code on
// the CPU.
//
// What differs from step to step (where the step goes, whose rows they are) stands in a ticket in
// mapped host memory, and the kernel takes the tickets in turn: so a captured CUDA graph can be
// replayed with other tickets.
//
// A block of PACK_THREADS threads packs PACK_ROWS rows. It adds up the accept counts of the rows in
// front of its own by itself, so that blocks need not wait for each other; the last block to finish
// writes the step's head. Values are checked as the CPU's save ops check them; the first bad one
// makes the step empty and is reported in the ticket.
#pragma once

#include "tensor.hpp"

namespace tp {

inline constexpr uint32_t PACK_ROWS = 8, PACK_THREADS = 128;

// A tensor in device memory. data is null where the column is not given as one.
struct PackColumn {
  const void *data;
  int64_t stride[3]; // in elements
  Dtype dtype;
};

// What a bad value is refused for, in the order in which the CPU's save ops look.
enum class PackError : uint32_t {
  none,
  ticket, // the step that was claimed last is not the one that is packed
  rows_outside,
  rows_range,
  generations_outside,
  generations_range,
  states_outside,
  states_range,
  positions_outside,
  accept_outside,
  accept_range,
  tokens_outside,
  ids_outside,
  ranks_outside,
  tokens_range,
};

enum : uint32_t {
  PACK_HAS_ROWS = 1, // the ticket holds this column, whatever tensor is given
  PACK_HAS_GENERATIONS = 2,
  PACK_HAS_STATES = 4,
  PACK_HAS_POSITIONS = 8,
};

// One step's errand, in host memory that the device can read. Its columns follow (ticket_columns).
struct PackTicket {
  uint64_t sequence;     // host: of the step in the source ring
  uint64_t saved_ns;     // host: CLOCK_MONOTONIC at the save
  uint64_t destination;  // host: device address of the slot to fill
  uint64_t head_copy;    // host: device address where the head goes too; 0: nowhere
  uint32_t num_rows;     // host
  uint32_t columns;      // host: PACK_HAS_*
  uint32_t is_replay;    // host: a captured launch is to take it
  uint32_t device_epoch; // host: tp_step.device_epoch
  uint64_t error;        // device: PackError << 40 | index of the element; UINT64_MAX: none
  uint64_t value;        // device: the bad element, its bits extended to 64
  uint64_t saved_tokens; // device: as tp_step.saved_tokens
  uint32_t is_unsigned;  // device: of value
  uint8_t pad_[TP_LINE_BYTES - 76];
};
static_assert(sizeof(PackTicket) == TP_LINE_BYTES);

struct TicketColumns {
  uint64_t rows, generations, states, positions, end;

  TP_BOTH explicit TicketColumns(uint64_t max_num_seqs) noexcept {
    Cursor at(sizeof(PackTicket));
    rows = at.take(4 * max_num_seqs);
    generations = at.take(4 * max_num_seqs);
    states = at.take(max_num_seqs);
    positions = at.take(4 * max_num_seqs);
    end = at.end(TP_LINE_BYTES);
  }
};

// What lives in device memory from one launch to the next.
struct PackState {
  uint64_t next_ticket;  // number of the next ticket
  uint64_t saved_tokens; // tokens saved so far
  uint64_t error;        // of the step in hand: as PackTicket.error, the smallest
  uint64_t num_tokens;   // of the step in hand: rows that have a token
  uint32_t num_blocks;   // of the step in hand: blocks that have finished
  uint32_t pad_;
};
inline constexpr uint64_t PACK_NO_ERROR = UINT64_MAX;

// The same for every replay of a captured launch.
struct PackArguments {
  PackColumn tokens, accept_num, topk_ids, logprobs, ranks;
  PackColumn rows, generations, states, positions;
  uint32_t num_rows; // of the tensors; a ticket may name fewer
  uint32_t depth, width;
  uint32_t flags; // TP_STEP_*
  uint32_t message_flag;
  Counts counts;            // what accept_num holds
  uint32_t has_wire_values; // a token below 0 says a state, and candidate 0 is the token
  uint32_t max_num_seqs;
  uint32_t num_tickets; // a power of two
  uint32_t is_captured;
  PackState *state;
  uint8_t *tickets;
  uint64_t *published; // where to say "published" from the kernel itself; null: the host does
};

// What the threads of a block share.
struct PackShared {
  PackTicket *ticket; // in host memory: read once, by open()
  tp_step *step;
  uint64_t sequence, saved_ns, head_copy;
  uint32_t given, device_epoch; // PACK_HAS_*
  TicketColumns columns{0};
  StepColumns at{0, 0, 0, 0};
  uint64_t first_row;
  uint64_t before[PACK_THREADS], total[PACK_THREADS]; // tokens in front of this block's; of all
  uint64_t first_token[PACK_ROWS + 1];                // of each row; then the end
  uint32_t num_rows, own_rows;
  uint32_t is_last;
};

[[nodiscard]] TP_BOTH constexpr uint32_t pack_blocks(uint32_t num_rows) noexcept {
  return num_rows == 0 ? 1 : (num_rows + PACK_ROWS - 1) / PACK_ROWS;
}

// The code of one phase for one thread; between two phases all threads of the block wait for each
// other. Nothing a phase reads is written by another thread in the same phase.
class PackThread {
public:
  TP_BOTH PackThread(const PackArguments &arguments, PackShared &shared, uint32_t block,
                     uint32_t num_blocks, uint32_t thread) noexcept
      : a_(arguments), s_(shared), block_(block), num_blocks_(num_blocks), thread_(thread) {}

  // What this block packs, and where to.
  TP_BOTH void open() noexcept {
    if (thread_ != 0)
      return;
    s_.columns = TicketColumns(a_.max_num_seqs);
    const uint64_t number = a_.state->next_ticket;
    s_.ticket = reinterpret_cast<PackTicket *>(a_.tickets +
                                               (number & (a_.num_tickets - 1)) * s_.columns.end);
    const PackTicket ticket = *s_.ticket;
    s_.step = reinterpret_cast<tp_step *>(ticket.destination);
    s_.sequence = ticket.sequence;
    s_.saved_ns = ticket.saved_ns;
    s_.head_copy = ticket.head_copy;
    s_.given = ticket.columns;
    s_.device_epoch = ticket.device_epoch;
    const bool is_ours = ticket.sequence == number && ticket.is_replay == a_.is_captured &&
                         ticket.num_rows <= a_.num_rows;
    if (!is_ours)
      report(PackError::ticket, 0);
    s_.num_rows = is_ours ? ticket.num_rows : 0;
    s_.first_row = uint64_t{block_} * PACK_ROWS;
    s_.own_rows = s_.first_row >= s_.num_rows
                      ? 0
                      : smaller(PACK_ROWS, s_.num_rows - static_cast<uint32_t>(s_.first_row));
  }

  // Adds up every PACK_THREADSth row's tokens.
  TP_BOTH void add_up() noexcept {
    uint64_t before = 0, total = 0;
    for (uint64_t i = thread_; i < s_.num_rows; i += PACK_THREADS) {
      const uint64_t tokens = tokens_of(i);
      total += tokens;
      before += i < s_.first_row ? tokens : 0;
    }
    s_.before[thread_] = before;
    s_.total[thread_] = total;
  }

  // One halving of the sums.
  TP_BOTH void halve(uint32_t half) noexcept {
    if (thread_ >= half)
      return;
    s_.before[thread_] += s_.before[thread_ + half];
    s_.total[thread_] += s_.total[thread_ + half];
  }

  // Where each row's tokens begin, and with their number where each column lies.
  TP_BOTH void place() noexcept {
    if (thread_ != 0)
      return;
    const bool is_packed = a_.flags & TP_STEP_ACCEPT;
    uint64_t at = is_packed ? s_.before[0] : s_.first_row;
    for (uint32_t k = 0; k < s_.own_rows; ++k) {
      s_.first_token[k] = at;
      at += is_packed ? tokens_of(s_.first_row + k) : 1;
    }
    for (uint32_t k = s_.own_rows; k <= PACK_ROWS; ++k)
      s_.first_token[k] = at;
    s_.at = StepColumns(s_.num_rows, is_packed ? s_.total[0] : s_.num_rows, a_.width, a_.flags);
  }

  // The columns that have an element a row.
  TP_BOTH void pack_rows() noexcept {
    uint64_t with_token = 0;
    for (uint32_t k = thread_; k < s_.own_rows; k += PACK_THREADS) {
      const uint64_t i = s_.first_row + k;
      int32_t row = static_cast<int32_t>(i), generation = 0, position = 0, state = TP_ROW_TOKEN;
      if (has(PACK_HAS_ROWS))
        row = ticket_column<int32_t>(s_.columns.rows)[i];
      else if (a_.rows.data != nullptr && !load(a_.rows, along(a_.rows, i), row))
        report(PackError::rows_outside, i);
      if (static_cast<uint32_t>(row) >= a_.max_num_seqs)
        report(PackError::rows_range, i);
      if (has(PACK_HAS_GENERATIONS))
        generation = ticket_column<int32_t>(s_.columns.generations)[i];
      else if (!load(a_.generations, along(a_.generations, i), generation))
        report(PackError::generations_outside, i);
      if (generation < 0)
        report(PackError::generations_range, i);
      if (!load_state(i, state))
        report(PackError::states_outside, i);
      if (state < TP_ROW_TOKEN || state > TP_ROW_ACKNOWLEDGED)
        report(PackError::states_range, i);
      column<int32_t>(*s_.step, s_.at.rows)[i] = row;
      column<int32_t>(*s_.step, s_.at.generations)[i] = generation;
      column<uint8_t>(*s_.step, s_.at.states)[i] = static_cast<uint8_t>(state);
      if (a_.flags & TP_STEP_POSITIONS) {
        if (has(PACK_HAS_POSITIONS))
          position = ticket_column<int32_t>(s_.columns.positions)[i];
        else if (!load(a_.positions, along(a_.positions, i), position))
          report(PackError::positions_outside, i);
        column<int32_t>(*s_.step, s_.at.positions)[i] = position;
      }
      if (a_.flags & TP_STEP_ACCEPT) {
        int32_t accepted = 0;
        if (!load_accepted(i, accepted))
          report(PackError::accept_outside, i);
        if (accepted < 0 || static_cast<uint32_t>(accepted) > a_.depth)
          report(PackError::accept_range, i);
        const uint64_t tokens = tokens_of(i);
        column<int32_t>(*s_.step, s_.at.accept_num)[i] = static_cast<int32_t>(tokens);
        with_token += tokens;
      } else {
        with_token += state == TP_ROW_TOKEN;
      }
    }
    if (with_token != 0)
      add(a_.state->num_tokens, with_token);
  }

  // The columns that have an element, or `width` of them, a token. Neighbouring threads write
  // neighbouring elements.
  TP_BOTH void pack_tokens() noexcept {
    const uint64_t begin = s_.first_token[0], first_element = begin * a_.width;
    const auto count = static_cast<uint32_t>(s_.first_token[PACK_ROWS] - begin);
    const bool is_pooling = a_.flags & TP_STEP_POOLING;
    if (!is_pooling)
      for (uint32_t t = thread_; t < count; t += PACK_THREADS)
        pack_token(begin + t);
    for (uint32_t e = thread_; e < count * a_.width; e += PACK_THREADS) {
      const uint32_t j = e % a_.width;
      const uint64_t to = first_element + e;
      const Place place = place_of(begin + e / a_.width);
      const bool has = has_candidates(place);
      if (!is_pooling) {
        int32_t id = -1;
        if (j == 0 && (!has || a_.has_wire_values))
          (void)load(a_.tokens, token_offset(place), id); // reported as a token
        else if (has && !load(a_.topk_ids, offset(a_.topk_ids, place, j), id))
          report(PackError::ids_outside, index(place, j));
        column<int32_t>(*s_.step, s_.at.topk_ids)[to] = id;
      }
      column<float>(*s_.step, s_.at.logprobs)[to] =
          has ? load_float(a_.logprobs, offset(a_.logprobs, place, j)) : 0.0f;
    }
  }

  // Tells whether this block is the last one. What all threads have written is visible before.
  TP_BOTH void arrive() noexcept {
    if (thread_ == 0) {
      fence();
      s_.is_last = add(a_.state->num_blocks, 1u) == num_blocks_ - 1;
    }
  }

  // The last block: the head, the verdict, and the state for the next launch.
  TP_BOTH void finish() noexcept {
    if (thread_ != 0 || !s_.is_last)
      return;
    fence();
    PackState &state = *a_.state;
    const uint64_t error = read(state.error), sequence = state.next_ticket;
    const bool is_good = error == PACK_NO_ERROR;
    const uint32_t kept = TP_STEP_NOT_NEED_STOP;
    if (is_good && a_.message_flag == TP_MESSAGE_TARGET && !(a_.flags & TP_STEP_POOLING))
      state.saved_tokens += read(state.num_tokens);
    if (!is_good)
      s_.at = StepColumns(0, 0, 0, a_.flags & kept);
    tp_step head{};
    head.source_sequence = sequence;
    head.saved_ns = s_.saved_ns;
    head.saved_tokens = state.saved_tokens;
    head.num_rows = is_good ? s_.num_rows : 0;
    head.num_tokens = !is_good                    ? 0
                      : a_.flags & TP_STEP_ACCEPT ? static_cast<uint32_t>(s_.total[0])
                                                  : s_.num_rows;
    head.width = is_good ? a_.width : 0;
    head.flags = is_good ? a_.flags : a_.flags & kept;
    head.message_flag = a_.message_flag;
    head.body_bytes = static_cast<uint32_t>(s_.at.end - sizeof(tp_step));
    head.bad = TP_BAD_NONE;
    head.device_epoch = is_good ? s_.device_epoch : 0; // an empty body lies nowhere
    *s_.step = head;
    if (s_.head_copy != 0)
      *reinterpret_cast<tp_step *>(s_.head_copy) = head;
    if (!is_good)
      report_value(error);
    s_.ticket->saved_tokens = state.saved_tokens;
    s_.ticket->error = error;
    state.error = PACK_NO_ERROR;
    state.num_tokens = 0;
    state.num_blocks = 0;
    state.next_ticket = sequence + 1;
    if (a_.published != nullptr)
      publish_from_device(*a_.published, sequence + 1);
  }

private:
  struct Place {
    uint64_t row, draft;
  };

  [[nodiscard]] TP_BOTH static uint32_t smaller(uint32_t a, uint32_t b) noexcept {
    return a < b ? a : b;
  }

  // The words that blocks share. One thread on the CPU needs no atomics.
  template <class Word> TP_BOTH static Word add(Word &word, Word by) noexcept {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Word) == 8)
      return atomicAdd(reinterpret_cast<unsigned long long *>(&word), by);
    else
      return atomicAdd(&word, by);
#else
    const Word old = word;
    word += by;
    return old;
#endif
  }
  [[nodiscard]] TP_BOTH static uint64_t read(const uint64_t &word) noexcept {
    return *const_cast<const volatile uint64_t *>(&word);
  }
  TP_BOTH void report(PackError error, uint64_t element) noexcept {
    const uint64_t word = static_cast<uint64_t>(error) << 40 | element;
#ifdef __CUDA_ARCH__
    atomicMin(reinterpret_cast<unsigned long long *>(&a_.state->error), word);
#else
    a_.state->error = word < a_.state->error ? word : a_.state->error;
#endif
  }
  // Before the host may read what this launch has written, all of the system must see it; before
  // another block may, this device.
  TP_BOTH void fence() const noexcept {
#ifdef __CUDA_ARCH__
    if (a_.published != nullptr)
      __threadfence_system();
    else
      __threadfence();
#endif
  }
  TP_BOTH void publish_from_device(uint64_t &word, uint64_t value) const noexcept {
#ifdef __CUDA_ARCH__
    __threadfence_system();
#endif
    *const_cast<volatile uint64_t *>(&word) = value;
  }

  [[nodiscard]] TP_BOTH bool has(uint32_t column) const noexcept { return s_.given & column; }
  template <class T> [[nodiscard]] TP_BOTH const T *ticket_column(uint64_t offset) const noexcept {
    return column<T>(*s_.ticket, offset);
  }

  // Reads an element as int32; false when it does not fit.
  [[nodiscard]] TP_BOTH static bool load(const PackColumn &c, int64_t i, int32_t &to) noexcept {
    switch (c.dtype) {
    case Dtype::int32:
      to = static_cast<const int32_t *>(c.data)[i];
      return true;
    case Dtype::uint8:
      to = static_cast<const uint8_t *>(c.data)[i];
      return true;
    case Dtype::uint32: {
      to = static_cast<const int32_t *>(c.data)[i];
      return to >= 0;
    }
    case Dtype::uint64: {
      const uint64_t value = static_cast<const uint64_t *>(c.data)[i];
      to = static_cast<int32_t>(value);
      return value <= INT32_MAX;
    }
    default: {
      const int64_t value = static_cast<const int64_t *>(c.data)[i];
      to = static_cast<int32_t>(value);
      return to == value;
    }
    }
  }
  [[nodiscard]] TP_BOTH static float load_float(const PackColumn &c, int64_t i) noexcept {
    switch (c.dtype) {
    case Dtype::float32:
      return static_cast<const float *>(c.data)[i];
    case Dtype::bfloat16:
      return float_of_bits(uint32_t{static_cast<const uint16_t *>(c.data)[i]} << 16);
    default:
      return half_to_float(static_cast<const uint16_t *>(c.data)[i]);
    }
  }
  [[nodiscard]] TP_BOTH bool load_state(uint64_t i, int32_t &state) const noexcept {
    if (has(PACK_HAS_STATES))
      state = ticket_column<uint8_t>(s_.columns.states)[i];
    else if (a_.states.data != nullptr && !load(a_.states, along(a_.states, i), state))
      return false;
    constexpr int32_t preempted = -9, recovery = -3;
    int32_t token = 0;
    if (a_.has_wire_values && state == TP_ROW_TOKEN &&
        load(a_.tokens, along(a_.tokens, i), token) && token < 0)
      state = token == preempted  ? TP_ROW_ACKNOWLEDGED
              : token == recovery ? TP_ROW_RECOVERY
                                  : TP_ROW_NONE;
    return true;
  }

  [[nodiscard]] TP_BOTH bool load_accepted(uint64_t i, int32_t &accepted) const noexcept {
    if (!load(a_.accept_num, along(a_.accept_num, i), accepted))
      return false;
    if (a_.counts == Counts::first_step)
      accepted = accepted == 1 ? 2 : 0;
    else if (a_.counts == Counts::behind_a_first && accepted > 0)
      accepted = accepted < INT32_MAX ? accepted + 1 : accepted;
    return true;
  }

  // Accepted tokens of row i; a bad count or state counts as none, and is reported elsewhere.
  [[nodiscard]] TP_BOTH uint64_t tokens_of(uint64_t i) const noexcept {
    int32_t accepted = 0, state = TP_ROW_TOKEN;
    if (!load_state(i, state) || state != TP_ROW_TOKEN || !load_accepted(i, accepted) ||
        accepted < 0 || static_cast<uint32_t>(accepted) > a_.depth)
      return 0;
    return static_cast<uint64_t>(accepted);
  }

  // Which row of this block token t is of.
  [[nodiscard]] TP_BOTH Place place_of(uint64_t t) const noexcept {
    uint32_t k = 0;
    while (s_.first_token[k + 1] <= t)
      ++k;
    return {s_.first_row + k, t - s_.first_token[k]};
  }

  // Where an element of a candidates' column lies, [n], [n, D], [n, T] or [n, D, T]; j < T.
  [[nodiscard]] TP_BOTH int64_t offset(const PackColumn &c, const Place &p,
                                       uint64_t j) const noexcept {
    const bool is_deep = a_.flags & TP_STEP_ACCEPT && a_.counts != Counts::behind_a_first;
    return along(c, p.row) + static_cast<int64_t>(p.draft) * c.stride[1] +
           static_cast<int64_t>(j) * (is_deep ? c.stride[2] : c.stride[1]);
  }
  // Where a token lies, in [n] or [n, D].
  [[nodiscard]] TP_BOTH int64_t token_offset(const Place &p) const noexcept {
    return along(a_.tokens, p.row) + static_cast<int64_t>(p.draft) * a_.tokens.stride[1];
  }
  [[nodiscard]] TP_BOTH bool has_candidates(const Place &p) const noexcept {
    return p.draft == 0 || a_.counts != Counts::behind_a_first;
  }
  [[nodiscard]] TP_BOTH static int64_t along(const PackColumn &c, uint64_t i) noexcept {
    return static_cast<int64_t>(i) * c.stride[0];
  }
  // The same element's number in its tensor, for a message.
  [[nodiscard]] TP_BOTH uint64_t index(const Place &p, uint64_t j) const noexcept {
    return (p.row * a_.depth + p.draft) * a_.width + j;
  }

  TP_BOTH void pack_token(uint64_t t) noexcept {
    const Place place = place_of(t);
    const uint64_t number = place.row * a_.depth + place.draft;
    int32_t token = 0, rank = 0, state = TP_ROW_TOKEN;
    if (!load(a_.tokens, token_offset(place), token))
      report(PackError::tokens_outside, number);
    else if (token < 0 && load_state(place.row, state) && state == TP_ROW_TOKEN &&
             generation_of(place.row) != 0)
      report(PackError::tokens_range, number);
    column<int32_t>(*s_.step, s_.at.tokens)[t] = token;
    if (a_.width == 0)
      return;
    if (has_candidates(place) && !load(a_.ranks, offset(a_.ranks, place, 0), rank))
      report(PackError::ranks_outside, number);
    column<int32_t>(*s_.step, s_.at.ranks)[t] = rank;
  }
  [[nodiscard]] TP_BOTH int32_t generation_of(uint64_t i) const noexcept {
    // (written by this block in the phase before)
    return column<int32_t>(*s_.step, s_.at.generations)[i];
  }

  // Tells the element that an error names.
  TP_BOTH void report_value(uint64_t error) noexcept {
    const uint64_t element = error & ((uint64_t{1} << 40) - 1);
    switch (static_cast<PackError>(error >> 40)) {
    case PackError::rows_outside:
    case PackError::rows_range:
      if (a_.rows.data == nullptr)
        return tell(element);
      return tell(a_.rows, along(a_.rows, element));
    case PackError::generations_outside:
    case PackError::generations_range:
      return tell(a_.generations, along(a_.generations, element));
    case PackError::states_outside:
    case PackError::states_range:
      return tell(a_.states, along(a_.states, element));
    case PackError::positions_outside:
      return tell(a_.positions, along(a_.positions, element));
    case PackError::accept_outside:
    case PackError::accept_range:
      return tell(a_.accept_num, along(a_.accept_num, element));
    case PackError::tokens_outside:
    case PackError::tokens_range:
      return tell(a_.tokens, token_offset(place_of_number(element)));
    case PackError::ranks_outside:
      return tell(a_.ranks, offset(a_.ranks, place_of_number(element), 0));
    case PackError::ids_outside:
      return tell(a_.topk_ids,
                  offset(a_.topk_ids, place_of_number(element / a_.width), element % a_.width));
    default:
      return tell(s_.sequence);
    }
  }
  [[nodiscard]] TP_BOTH Place place_of_number(uint64_t number) const noexcept {
    return {number / a_.depth, number % a_.depth};
  }
  TP_BOTH void tell(uint64_t value) noexcept {
    s_.ticket->value = value;
    s_.ticket->is_unsigned = 0;
  }
  TP_BOTH void tell(const PackColumn &c, int64_t i) noexcept {
    if (c.dtype == Dtype::int32)
      tell(static_cast<uint64_t>(int64_t{static_cast<const int32_t *>(c.data)[i]}));
    else if (c.dtype == Dtype::uint8)
      tell(static_cast<const uint8_t *>(c.data)[i]);
    else if (c.dtype == Dtype::uint32)
      tell(static_cast<const uint32_t *>(c.data)[i]);
    else
      tell(static_cast<const uint64_t *>(c.data)[i]);
    s_.ticket->is_unsigned = c.dtype == Dtype::uint64;
  }

  const PackArguments &a_;
  PackShared &s_;
  const uint32_t block_, num_blocks_, thread_;
};

// The phases of one block in their order. each(phase, ...) has every thread do it, and returns when
// all have.
template <class Each> TP_BOTH void pack_block(const PackArguments &a, Each &&each) {
  each(&PackThread::open);
  if (a.flags & TP_STEP_ACCEPT) {
    each(&PackThread::add_up);
    for (uint32_t half = PACK_THREADS / 2; half != 0; half /= 2)
      each(&PackThread::halve, half);
  }
  each(&PackThread::place);
  each(&PackThread::pack_rows);
  each(&PackThread::pack_tokens);
  each(&PackThread::arrive);
  each(&PackThread::finish);
}

#ifndef __CUDACC__
// The kernel on the CPU. `seed` chooses the order of blocks, and of threads in a phase: any order
// must give the same bytes.
inline void pack_on_cpu(const PackArguments &a, uint32_t seed = 0) noexcept {
  const uint32_t num_blocks = pack_blocks(a.num_rows);
  for (uint32_t b = 0; b < num_blocks; ++b) {
    const uint32_t block = (b + seed) % num_blocks;
    PackShared shared;
    pack_block(a, [&](auto phase, auto... more) {
      for (uint32_t t = 0; t < PACK_THREADS; ++t) {
        PackThread thread(a, shared, block, num_blocks, (t * 37 + seed) % PACK_THREADS);
        (thread.*phase)(more...);
      }
    });
  }
}
#endif

} // namespace tp
