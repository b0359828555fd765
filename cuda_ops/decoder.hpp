// decoder.hpp: HOT PATH. One turn of decoder k: a slot or a mark in, a frame and new progress out,
// committed by one word.
//
// The order of a turn (each line is one store that others can see; tests kill between any two):
//   1  poll           a slot is published, or a mark waits
//   2  load           admissions and marks, after the slot was seen
//   3  write progress into the older copy: every row changed in this or the previous turn
//   4  write frame
//   5  write commit   slots done, frames, counters, into the older copy
//   6  turn word      makes 3 to 5 valid at once
//   7  release        the slot
// A successor goes on at the committed turn; whatever was half written is written again.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "histograms.hpp"
#include "ring.hpp"

namespace tp {

// At most one item per row: there is room for each, so that to add one is a store and a count.
template <class T> class PerRow {
public:
  void resize(size_t rows) { items_.resize(rows); }
  void push_back(const T &item) noexcept { items_[size_++] = item; }
  void clear() noexcept { size_ = 0; }
  void swap(PerRow &other) noexcept {
    items_.swap(other.items_);
    std::swap(size_, other.size_);
  }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] const T &operator[](size_t i) const noexcept { return items_[i]; }
  [[nodiscard]] const T *begin() const noexcept { return items_.data(); }
  [[nodiscard]] const T *end() const noexcept { return items_.data() + size_; }

private:
  std::vector<T> items_;
  size_t size_ = 0;
};

// Design: `state_` is the current progress of the rows this decoder owns (row % N == k), private;
// the shared copies are written from it. `changed_`/`changed_before_` name the rows that the older
// copy lacks. Only this decoder writes its tp_decoder, its frames and its rows' tp_progress.
class Decoder {
public:
  Decoder(const Core &core, uint32_t k)
      : core_(core), k_(k), shared_(core.decoder(k)), role_(core.role(TP_ROLE_DECODER + k)),
        options_(core.header().options), turn_(observe(shared_.turn)),
        commit_(shared_.commit[turn_ & 1]), consumer_(core, k, commit_.slots_done) {
    const uint32_t n = core.sizes.num_decoders;
    for (uint32_t row = k; row < core.sizes.max_num_seqs; row += n) {
      rows_.push_back(Row{});
      state_.push_back(core.progress(turn_ & 1, row));
      if (state_.back().spec_steps == 0) // then the heads are a former life's: see write_row()
        std::fill(std::begin(state_.back().heads), std::end(state_.back().heads), 0u);
    }
    changed_.resize(rows_.size());
    changed_before_.resize(rows_.size());
    for (uint32_t i = 0; i < rows_.size(); ++i)
      changed_before_.push_back(i);
    out_.resize(rows_.size());
    judge_predecessor();
  }

  [[nodiscard]] uint64_t slots_done() const noexcept { return commit_.slots_done; }

  // Does at most `turns` turns; waits for the first one. Returns how many were done, 0 when the
  // time is up or a signal came.
  uint32_t run(uint32_t turns, const Patience &patience) noexcept {
    beat();
    uint32_t done = 0;
    if (wait_for_output(patience) && wait_for_input(patience))
      do {
        turn();
        beat();
      } while (++done < turns && has_output() && has_input());
    beat();
    return done;
  }

private:
  // What this decoder remembers of a row's admission.
  struct Row {
    uint64_t generation = 0;
    uint64_t from_sequence = 0, from_barrier = 0;
    uint64_t arrival_ns = 0;
    uint32_t max_tokens = 0;
    uint32_t num_emitted = 0;
    uint32_t prompt_tokens = 0;
    uint32_t num_eos = 0;
    uint32_t id_bytes = 0;
    uint32_t num_chunks = 0;
    uint64_t preprocess_end_ns = 0;
    uint64_t inference_start_ns = 0;
    bool is_prefill = false; // its first token is all that this instance delivers
    bool is_warm_up = false;
    bool is_shielded = false;       // in this turn
    uint32_t mark = TP_FINISH_NONE; // that applies in this turn
    uint64_t visited = 0;           // turn in which a slot's row named it
    bool is_changed = false;
  };

  // One row of the frame in hand.
  struct Out {
    uint32_t index; // into rows_ and state_
    uint32_t send_idx;
    uint64_t first; // first token, as an index into the slot's token columns
    uint32_t num_tokens;
    uint32_t reason;
    uint32_t num_drafts = 0; // tokens from `first` on that are shown as drafts
  };

  // A time between two steps that `tokens` tokens have in common, `taken` of each row.
  struct Gap {
    uint64_t ns;
    uint32_t taken, tokens;
  };

  // Row i of a slot, once it is known whose it is.
  struct SlotRow {
    uint32_t index;
    uint32_t generation;
    uint32_t state;
    uint64_t first;
    uint32_t num;
  };

  void beat() noexcept {
    put(role_.heartbeat_ns, now_ns());
    put(role_.turns, get(role_.turns) + 1);
  }

  [[nodiscard]] uint32_t row_number(uint32_t index) const noexcept {
    return k_ + index * core_.sizes.num_decoders;
  }

  [[nodiscard]] bool has_output() const noexcept {
    // SYNC POINT: output released - acquire: the client has done with the frames below it
    return commit_.frames - observe(core_.client().output[k_].released) < core_.sizes.output_slots;
  }

  [[nodiscard]] bool wait_for_output(const Patience &patience) noexcept {
    if (has_output())
      return true;
    const uint64_t begun = now_ns();
    put(role_.bell.wake_at,
        commit_.frames - core_.sizes.output_slots + std::max(1u, core_.sizes.output_slots / 4));
    const bool has =
        wait_for(role_.bell, TP_WAIT_SPACE, patience, [&]() noexcept { return has_output(); });
    put(role_.blocked_ns, get(role_.blocked_ns) + (now_ns() - begun));
    put(role_.blocked_times, get(role_.blocked_times) + 1);
    return has;
  }

  [[nodiscard]] bool has_input() noexcept { return consumer_.try_poll() != nullptr || has_mark(); }

  [[nodiscard]] bool wait_for_input(const Patience &patience) noexcept {
    return wait_for(role_.bell, TP_WAIT_INPUT, patience, [&]() noexcept { return has_input(); });
  }

  // A mark that a turn without a slot may turn into a final now.
  [[nodiscard]] bool has_mark() const noexcept {
    for (uint32_t i = 0; i < rows_.size(); ++i)
      if (ends(applicable(i, observe(core_.admitted(row_number(i))), commit_.next_source_sequence)))
        return true;
    return false;
  }

  [[nodiscard]] static bool ends(uint32_t mark) noexcept {
    return mark != TP_FINISH_NONE && mark != TP_MARK_SHIELD && mark != TP_OUTPUT_ACKNOWLEDGED &&
           mark != TP_OUTPUT_SILENT;
  }

  // TP_FINISH_* of the mark that ends generation `generation` of row i at source sequence `at`.
  [[nodiscard]] uint32_t applicable(uint32_t i, uint64_t generation, uint64_t at) const noexcept {
    const tp_mark &mark = core_.mark(row_number(i));
    // SYNC POINT: mark - acquire: its from_sequence is there
    const uint64_t word = observe(mark.word);
    if (word == 0 || word >> 8 != generation || at < get(mark.from_sequence))
      return TP_FINISH_NONE;
    if (state_[i].generation == generation && state_[i].terminal != TP_FINISH_NONE)
      return TP_FINISH_NONE;
    return word & 0xff;
  }

  void turn() noexcept {
    const tp_step *slot = consumer_.try_poll();
    begin_attempt();
    fault::point("decoder.polled");
    ++turn_;
    next_ = commit_;
    out_.clear();
    num_tokens_ = num_finals_ = num_drafts_ = num_firsts_ = 0;
    has_news_ = false;
    load_admissions(slot ? slot->source_sequence : commit_.next_source_sequence);
    fault::point("decoder.loaded");
    if (slot && is_poison_)
      skip_poison(*slot);
    else if (slot)
      decode(*slot);
    // A frame of drafts or prompt logprobs holds nothing else: marks wait for the next turn.
    if (!slot || has_outputs(*slot))
      finish_marked();
    begin_rewrite();
    write_progress();
    fault::point("decoder.progress_written");
    if (!out_.empty() || (slot && (is_end_of_drafts(*slot) || is_end_of_message(*slot))))
      write_frame(slot);
    fault::point("decoder.frame_written");
    write_commit();
    fault::point("decoder.commit_written");
    // SYNC POINT: turn word - release: progress, frame and commit record of this turn are valid
    publish(shared_.turn, turn_);
    fault::point("decoder.turn_stored");
    commit_ = next_;
    end_attempt(slot != nullptr);
    ring_bell(core_.client().bell); // without a frame too: a client may wait for the whole step
    if (has_news_)
      count_event(core_.role(TP_ROLE_COORDINATOR).bell);
    if (slot)
      consumer_.release(commit_.slots_done);
    fault::point("decoder.released");
    put(role_.progress_ns, now_ns());
  }

  [[nodiscard]] static bool has_outputs(const tp_step &slot) noexcept {
    return slot.message_flag == TP_MESSAGE_TARGET && !(slot.flags & TP_STEP_PROMPT);
  }

  // Which slot is in hand is noted, so that a successor knows what its predecessor died of. The
  // first death may be chance; a slot that kills twice is not looked at a third time.
  void begin_attempt() noexcept { put(shared_.attempt, commit_.slots_done + 1); }
  void end_attempt(bool had_slot) noexcept {
    put(shared_.attempt, uint64_t{0});
    if (!had_slot)
      return;
    put(shared_.attempt_deaths, uint64_t{0});
    is_poison_ = false;
  }
  void judge_predecessor() noexcept {
    if (get(shared_.attempt) != commit_.slots_done + 1)
      return;
    put(shared_.attempt_deaths, get(shared_.attempt_deaths) + 1);
    put(shared_.attempt, uint64_t{0});
    is_poison_ = get(shared_.attempt_deaths) >= 2;
  }

  // The rows of such a slot are not known, so every running one of this decoder ends.
  void skip_poison(const tp_step &slot) noexcept {
    next_.slots_done += 1;
    next_.next_source_sequence = slot.source_sequence + 1;
    next_.counters.steps += 1;
    next_.counters.poison_slots += 1;
    end_running(UINT64_MAX, UINT64_MAX);
  }

  // Requests that were admitted by source sequence `at`, of a queue before `barrier`, end with an
  // error in this turn.
  void end_running(uint64_t at, uint64_t barrier) noexcept {
    for (uint32_t i = 0; i < rows_.size(); ++i)
      if (rows_[i].generation != 0 && rows_[i].from_sequence <= at &&
          rows_[i].from_barrier <= barrier && state_[i].terminal == TP_FINISH_NONE &&
          rows_[i].mark == TP_FINISH_NONE &&
          observe(core_.freed(row_number(i))) != rows_[i].generation)
        set_mark(i, TP_FINISH_ERROR);
  }

  void set_mark(uint32_t i, uint32_t mark) noexcept {
    rows_[i].mark = mark;
    has_marks_ |= mark != TP_FINISH_NONE;
  }

  void load_admissions(uint64_t at) noexcept {
    has_marks_ = false;
    for (uint32_t i = 0; i < rows_.size(); ++i) {
      // SYNC POINT: admission - acquire: the fields of this generation are there
      const uint64_t generation = observe(core_.admitted(row_number(i)));
      if (generation != rows_[i].generation)
        load_admission(i, generation);
      const uint32_t mark = generation ? applicable(i, generation, at) : uint32_t{TP_FINISH_NONE};
      rows_[i].is_shielded = mark == TP_MARK_SHIELD;
      set_mark(i, rows_[i].is_shielded ? uint32_t{TP_FINISH_NONE} : mark);
    }
  }

  void load_admission(uint32_t i, uint64_t generation) noexcept {
    const tp_admission &a = core_.admission(row_number(i));
    Row &row = rows_[i];
    row.generation = generation;
    if (state_[i].generation == generation && state_[i].terminal != TP_FINISH_NONE)
      return; // a successor: that life has ended, its admission may be written over by now
    row.from_sequence = a.from_sequence;
    row.from_barrier = a.from_barrier;
    row.arrival_ns = a.arrival_ns;
    // Without generations an end that the wire does not show would let its tokens run on.
    row.max_tokens = has_writer(options_.source) ? a.max_tokens : 0;
    row.num_emitted = a.num_emitted;
    row.prompt_tokens = a.prompt_tokens;
    row.num_eos = std::min(a.num_eos, core_.sizes.max_eos_ids);
    row.id_bytes = std::min(a.id_bytes, core_.sizes.max_request_id_bytes);
    row.num_chunks = a.num_chunks;
    row.preprocess_end_ns = a.preprocess_end_ns;
    row.inference_start_ns = a.inference_start_ns;
    row.is_prefill =
        options_.role == TP_ENGINE_PREFILL && (a.flags & TP_ADMISSION_DISAGGREGATED) != 0;
    row.is_warm_up = (a.flags & TP_ADMISSION_WARM_UP) != 0;
    if (state_[i].generation == generation)
      return; // a successor: the request goes on where it was committed
    state_[i] = tp_progress{};
    state_[i].generation = static_cast<uint32_t>(generation);
    state_[i].emitted = row.num_emitted;
    change(i);
  }

  void change(uint32_t i) noexcept {
    if (!rows_[i].is_changed) {
      rows_[i].is_changed = true;
      changed_.push_back(i);
    }
  }

  void decode(const tp_step &slot) noexcept {
    tp_counters &count = next_.counters;
    next_.slots_done += 1;
    next_.next_source_sequence = slot.source_sequence + 1;
    count.steps += 1;
    if (slot.flags & TP_STEP_GAP)
      end_running(slot.source_sequence, slot.flags & TP_STEP_UNSTAMPED ? slot.barrier : UINT64_MAX);
    if (slot.bad != TP_BAD_NONE && slot.bad < TP_BAD_REASONS && k_ == 0)
      (&count.bad_rows)[slot.bad - 1] += 1; // what rows it has end with an error
    const uint32_t n = slot.num_rows, decoders = core_.sizes.num_decoders;
    const StepColumns at(n, slot.num_tokens, slot.width, slot.flags);
    const auto *rows = column<uint32_t>(slot, at.rows);
    const auto *accept =
        slot.flags & TP_STEP_ACCEPT ? column<int32_t>(slot, at.accept_num) : nullptr;
    if (accept && !adds_up(slot, accept)) {
      if (k_ == 0) {
        count.bad_tokens += 1;
        count.tokens_seen += num_countable(slot);
        count.dropped_bad_row += num_countable(slot);
      }
      return;
    }
    uint64_t first = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const bool is_bad = accept && !is_count(slot, accept[i]);
      const auto num = is_bad ? 0u : accept ? static_cast<uint32_t>(accept[i]) : 1u;
      if (decoders == 1 || rows[i] % decoders == k_)
        decode_row(slot, at, i, rows[i], first, num, is_bad);
      first += num;
    }
    for (Gap &gap : gaps_)
      flush(gap);
  }

  // The accept counts are the engine's: their sum must be the token count that the columns have.
  [[nodiscard]] bool adds_up(const tp_step &slot, const int32_t *accept) const noexcept {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < slot.num_rows; ++i)
      if (is_count(slot, accept[i])) // a bad one costs its own row only, which then has no tokens
        sum += static_cast<uint32_t>(accept[i]);
    return sum == slot.num_tokens;
  }

  [[nodiscard]] bool is_count(const tp_step &slot, int32_t accepted) const noexcept {
    const uint32_t most =
        slot.flags & TP_STEP_PROMPT ? slot.num_tokens : core_.sizes.max_draft_tokens;
    return accepted >= 0 && static_cast<uint32_t>(accepted) <= most;
  }

  // Tokens that a request is owed: drafts, prompt tokens and pooling vectors are none.
  [[nodiscard]] static uint32_t num_countable(const tp_step &slot) noexcept {
    const bool none =
        slot.message_flag == TP_MESSAGE_DRAFT || slot.flags & (TP_STEP_POOLING | TP_STEP_PROMPT);
    return none ? 0 : slot.num_tokens;
  }

  [[gnu::always_inline]] void decode_row(const tp_step &slot, const StepColumns &at, uint32_t i,
                                         uint32_t number, uint64_t first, uint32_t num,
                                         bool is_bad) noexcept {
    tp_counters &count = next_.counters;
    SlotRow row{0, column<uint32_t>(slot, at.generations)[i], column<uint8_t>(slot, at.states)[i],
                first, num};
    is_bad |= row.state > TP_ROW_ACKNOWLEDGED;
    if (row.state != TP_ROW_TOKEN && !is_bad)
      row.num = 0;
    const bool is_tokens = num_countable(slot) == slot.num_tokens;
    count.rows_seen += 1;
    if (is_tokens)
      count.tokens_seen += row.num;
    if (uint64_t *dropped = refusal(slot, row, number)) {
      if (is_tokens)
        *dropped += row.num;
      return;
    }
    if (options_.enable_draft_logprob && slot.message_flag == TP_MESSAGE_TARGET)
      forget_target(row.index);
    if (row.state == TP_ROW_ACKNOWLEDGED)
      acknowledge(slot, row);
    else if (row.state == TP_ROW_NONE)
      pass_silent(slot, row);
    else if (state_[row.index].terminal != TP_FINISH_NONE ||
             rows_[row.index].mark != TP_FINISH_NONE)
      count.dropped_finished += is_tokens ? row.num : 0;
    else if (is_bad) {
      count.dropped_bad_row += is_tokens ? row.num : 0;
      finish(row, 0, 0, TP_FINISH_ERROR, slot);
    } else if (rows_[row.index].is_shielded)
      count.dropped_shielded += is_tokens ? row.num : 0;
    else if (slot.message_flag == TP_MESSAGE_DRAFT)
      pass_drafts(slot, at, i, row);
    else if (slot.flags & TP_STEP_PROMPT)
      pass_prompt(slot, at, i, row);
    else if (row.state == TP_ROW_RECOVERY)
      finish(row, 0, 0, TP_FINISH_RECOVERY, slot);
    else if (slot.flags & TP_STEP_POOLING)
      finish({row.index, row.generation, row.state, i, 0}, 0, 0, TP_FINISH_STOP, slot);
    else if (row.num != 0)
      take_tokens(slot, at, i, row);
  }

  // Where the tokens of a row are counted that is not to be delivered; nullptr: it is ours.
  [[nodiscard]] uint64_t *refusal(const tp_step &slot, SlotRow &row, uint32_t number) noexcept {
    tp_counters &count = next_.counters;
    if (number >= core_.sizes.max_num_seqs)
      return &count.dropped_bad_row;
    row.index = number / core_.sizes.num_decoders;
    Row &known = rows_[row.index];
    if (slot.flags & TP_STEP_UNSTAMPED) {
      if (known.generation == 0)
        return &count.dropped_unadmitted;
      row.generation = static_cast<uint32_t>(known.generation);
    }
    if (row.generation == 0)
      return &count.dropped_padded;
    if (row.generation != known.generation)
      return row.generation < known.generation ? &count.dropped_stale : &count.dropped_unadmitted;
    if (slot.source_sequence < known.from_sequence || slot.barrier < known.from_barrier)
      return &count.dropped_early;
    if (known.visited == turn_)
      return &count.dropped_repeated;
    known.visited = turn_;
    return nullptr;
  }

  // On a wire without generations an ended row that is shown empty has been let go of: a row that
  // was reclaimed by a deadline is given out again then.
  void note_idle(const tp_step &slot, uint32_t i) noexcept {
    if (!(slot.flags & TP_STEP_UNSTAMPED) || state_[i].terminal == TP_FINISH_NONE ||
        get(core_.freed(row_number(i))) == state_[i].generation)
      return;
    state_[i].idle_at = slot.source_sequence + 1;
    has_news_ = true;
    change(i);
  }

  // Also drafts of nobody are told: the handle holds their target's outputs until they come.
  [[nodiscard]] bool is_end_of_drafts(const tp_step &slot) const noexcept {
    return options_.enable_draft_logprob && slot.message_flag == TP_MESSAGE_DRAFT;
  }

  // Which rows a message names, and which not, tells a scheduler of a preempted row (FastDeploy's).
  // Told also where no row is ours. Once is enough: the handle puts the decoders' frames together.
  [[nodiscard]] bool is_end_of_message(const tp_step &slot) const noexcept {
    return k_ == 0 && options_.report_acknowledgements && slot.flags & TP_STEP_MESSAGE_END &&
           slot.num_rows < core_.sizes.max_num_seqs;
  }

  // On a queue a message names its first rows; from a socket any, each of which must be told.
  [[nodiscard]] bool names_rows_singly() const noexcept {
    return options_.report_acknowledgements && options_.source == TP_SOURCE_ZMQ;
  }

  void pass_silent(const tp_step &slot, const SlotRow &row) noexcept {
    note_idle(slot, row.index);
    if (names_rows_singly() && has_outputs(slot) && state_[row.index].terminal == TP_FINISH_NONE &&
        rows_[row.index].mark == TP_FINISH_NONE)
      push({row.index, state_[row.index].emitted, row.first, 0, TP_OUTPUT_SILENT});
  }

  // Drafts without a position belong to the last target step: a row that it gave nothing has none.
  void forget_target(uint32_t i) noexcept {
    if (state_[i].last_send_idx == no_target)
      return;
    state_[i].last_send_idx = no_target;
    change(i);
  }

  // Only what was saved after the engine had been told is its answer. A client whose scheduler
  // tells the engine itself hears of every one of a row that runs.
  void acknowledge(const tp_step &slot, const SlotRow &row) noexcept {
    if (options_.report_acknowledgements && has_outputs(slot) &&
        state_[row.index].terminal == TP_FINISH_NONE && rows_[row.index].mark == TP_FINISH_NONE)
      push({row.index, state_[row.index].emitted, row.first, 0, TP_OUTPUT_ACKNOWLEDGED});
    if (slot.source_sequence < get(core_.admission(row_number(row.index)).acknowledge_from))
      return;
    tp_progress &p = state_[row.index];
    p.acknowledged = row.generation;
    p.num_acknowledged += 1;
    next_.counters.acknowledgements += 1;
    has_news_ = true;
    change(row.index);
  }

  // Drafts' logprobs belong to the target output before them; the handle joins the two.
  void pass_drafts(const tp_step &slot, const StepColumns &at, uint32_t i,
                   const SlotRow &row) noexcept {
    next_.counters.draft_rows_seen += 1;
    if (!options_.enable_draft_logprob || row.num == 0)
      return;
    const int32_t position =
        slot.flags & TP_STEP_POSITIONS ? column<int32_t>(slot, at.positions)[i] : -1;
    if (position < 0 && state_[row.index].last_send_idx == no_target)
      return;
    next_.counters.draft_rows_delivered += 1;
    push({row.index,
          position >= 0 ? static_cast<uint32_t>(position) : state_[row.index].last_send_idx,
          row.first, row.num, TP_FINISH_NONE});
  }

  void pass_prompt(const tp_step &slot, const StepColumns &at, uint32_t i,
                   const SlotRow &row) noexcept {
    if (row.num == 0)
      return;
    next_.counters.prompt_rows += 1;
    push({row.index, static_cast<uint32_t>(column<int32_t>(slot, at.positions)[i]), row.first,
          row.num, TP_FINISH_NONE});
  }

  [[gnu::always_inline]] void take_tokens(const tp_step &slot, const StepColumns &at, uint32_t i,
                                          SlotRow row) noexcept {
    tp_progress &p = state_[row.index];
    const Row &known = rows_[row.index];
    tp_counters &count = next_.counters;
    if (p.chunks < known.num_chunks) {
      p.chunks += 1;
      change(row.index);
      if (p.chunks < known.num_chunks) {
        count.dropped_chunk += row.num;
        return;
      }
    }
    if (slot.flags & TP_STEP_POSITIONS) {
      const int32_t position = column<int32_t>(slot, at.positions)[i];
      if (position >= 0 && static_cast<uint32_t>(position) > p.emitted) {
        // Tokens are missing before this one: to go on would hide the hole.
        count.dropped_bad_row += row.num;
        finish(row, 0, 0, TP_FINISH_ERROR, slot);
        return;
      }
      if (position >= 0) {
        const uint32_t again = std::min(row.num, p.emitted - static_cast<uint32_t>(position));
        count.dropped_repeated += again;
        row.first += again;
        row.num -= again;
      }
    }
    if (row.num != 0)
      cut(slot, column<int32_t>(slot, at.tokens) + row.first, row);
  }

  // The one place where a row's tokens end: ids, logprobs, ranks, drafts and counts are cut here.
  [[gnu::always_inline]] void cut(const tp_step &slot, const int32_t *tokens,
                                  const SlotRow &row) noexcept {
    const Row &known = rows_[row.index];
    const int32_t *eos = core_.eos(row_number(row.index));
    tp_counters &count = next_.counters;
    uint32_t reason = TP_FINISH_NONE, taken = 0, shown = 0;
    while (taken < row.num && reason == TP_FINISH_NONE) {
      const int32_t token = tokens[taken];
      if (token < 0) {
        reason = TP_FINISH_ERROR;
        break;
      }
      ++taken;
      const bool is_end = std::find(eos, eos + known.num_eos, token) != eos + known.num_eos;
      shown += is_end && options_.internal_adapter ? 0 : 1;
      if (is_end || known.is_prefill)
        reason = TP_FINISH_STOP;
      else if (known.max_tokens != 0 && state_[row.index].emitted + taken >= known.max_tokens)
        reason = TP_FINISH_LENGTH;
    }
    if (known.is_warm_up) {
      count.dropped_warm_up += shown;
      count.dropped_adapter += taken - shown;
      count.dropped_finished += row.num - taken;
      finish(row, taken, 0, reason, slot);
      return;
    }
    count.dropped_adapter += taken - shown;
    (reason == TP_FINISH_ERROR ? count.dropped_bad_row
     : known.is_prefill        ? count.dropped_prefill
                               : count.dropped_finished) += row.num - taken;
    finish(row, taken, shown, reason, slot);
  }

  // Notes an output of `taken` tokens, of which the first `shown` are delivered, and its end if
  // any.
  void finish(const SlotRow &row, uint32_t taken, uint32_t shown, uint32_t reason,
              const tp_step &slot) noexcept {
    tp_progress &p = state_[row.index];
    const Row &known = rows_[row.index];
    const bool has_drafts = known.is_prefill && row.num > 1 && reason == TP_FINISH_STOP;
    if (!known.is_warm_up || reason != TP_FINISH_NONE) // of a warm-up only the end is told
      push({row.index, p.emitted, row.first, shown, reason, has_drafts ? row.num : 0});
    next_.counters.tokens_delivered += shown;
    if (taken != 0 && known.is_warm_up) {
      p.emitted += taken;
    } else if (taken != 0) {
      time_tokens(p, known, taken, slot.saved_ns);
      if (slot.flags & TP_STEP_ACCEPT)
        count_accepted(p, taken);
      p.last_send_idx = p.emitted;
      p.emitted += taken;
    }
    if (reason != TP_FINISH_NONE) {
      if (!known.is_warm_up &&
          (reason == TP_FINISH_STOP || reason == TP_FINISH_LENGTH || reason == TP_FINISH_RECOVERY))
        time_completion(p, known, slot.saved_ns);
      end(row.index, reason);
    }
    change(row.index);
  }

  void push(const Out &out) noexcept {
    out_.push_back(out);
    num_tokens_ += out.num_tokens;
    num_drafts_ += out.num_drafts;
  }

  void end(uint32_t index, uint32_t reason) noexcept {
    state_[index].terminal = reason;
    (&next_.counters.finals_stop)[reason - 1] += 1;
    ++num_finals_;
    has_news_ = true;
  }

  [[gnu::always_inline]] void time_tokens(tp_progress &p, const Row &known, uint32_t taken,
                                          uint64_t now) noexcept {
    if (p.emitted == 0) {
      if (known.arrival_ns != 0 && now >= known.arrival_ns)
        count_value(shared_.time_to_first_token, first_token_bounds, now - known.arrival_ns);
      if (known.preprocess_end_ns != 0 && known.inference_start_ns >= known.preprocess_end_ns)
        count_value(shared_.request_queue_time, request_bounds,
                    known.inference_start_ns - known.preprocess_end_ns);
      if (known.inference_start_ns != 0 && now >= known.inference_start_ns)
        count_value(shared_.request_prefill_time, request_bounds, now - known.inference_start_ns);
    } else if (p.last_token_ns != 0 && now >= p.last_token_ns) {
      count_gap(now - p.last_token_ns, taken);
    }
    if (p.first_token_ns == 0) {
      p.first_token_ns = now;
      ++num_firsts_;
    }
    p.last_token_ns = now;
  }

  // Rows that run together have the same gap between two steps: it is counted once for all of them.
  void count_gap(uint64_t since_last, uint32_t taken) noexcept {
    Gap &gap = gaps_[std::min(taken, uint32_t{TP_MAX_DRAFT_TOKENS})];
    if (gap.ns != since_last || gap.taken != taken) {
      flush(gap);
      gap.ns = since_last;
      gap.taken = taken;
    }
    gap.tokens += taken;
  }

  // A step's gap is shared by its tokens.
  void flush(Gap &gap) noexcept {
    if (gap.tokens != 0)
      count_value(shared_.time_per_output_token, per_token_bounds, gap.ns / gap.taken, gap.tokens);
    gap.tokens = 0;
  }

  void time_completion(const tp_progress &p, const Row &known, uint64_t now) noexcept {
    const bool has_start = known.inference_start_ns != 0 && now > known.inference_start_ns;
    if (has_start)
      count_value(shared_.request_token_ratio, token_rate_bounds,
                  p.emitted * (1000 * second) / (now - known.inference_start_ns));
    if (known.is_prefill)
      return;
    next_.counters.completions += 1;
    if (p.first_token_ns != 0 && now >= p.first_token_ns)
      count_value(shared_.request_decode_time, request_bounds, now - p.first_token_ns);
    if (has_start)
      count_value(shared_.request_inference_time, request_bounds, now - known.inference_start_ns);
    count_value(shared_.request_generation_tokens, token_count_bounds, p.emitted);
  }

  // Only tokens that are emitted count as accepted, and only rows that emit as steps.
  void count_accepted(tp_progress &p, uint32_t taken) noexcept {
    next_.counters.spec_rows += 1;
    p.spec_steps += 1;
    for (uint32_t j = 0; j < std::min(taken, uint32_t{TP_MAX_DRAFT_TOKENS}); ++j) {
      next_.counters.spec_heads[j] += 1;
      p.heads[j] += 1;
    }
  }

  void finish_marked() noexcept {
    for (uint32_t i = 0; has_marks_ && i < rows_.size(); ++i) {
      if (rows_[i].mark == TP_FINISH_NONE)
        continue;
      const uint32_t reason =
          rows_[i].mark <= TP_FINISH_SHUTDOWN ? rows_[i].mark : uint32_t{TP_FINISH_ERROR};
      push({i, state_[i].emitted, 0, 0, reason});
      end(i, reason);
      change(i);
    }
  }

  void write_progress() noexcept {
    for (const uint32_t i : changed_)
      write_row(i);
    for (const uint32_t i : changed_before_)
      if (!rows_[i].is_changed)
        write_row(i);
    for (const uint32_t i : changed_)
      rows_[i].is_changed = false;
    changed_before_.swap(changed_);
    changed_.clear();
  }

  // Word by word: the coordinator may be reading the copy that this turn retires.
  template <size_t Bytes> static void rewrite(void *to, const void *from) noexcept {
    static_assert(Bytes % 8 == 0);
#pragma GCC unroll 16
    for (size_t i = 0; i < Bytes / 8; ++i)
      put(static_cast<uint64_t *>(to)[i], static_cast<const uint64_t *>(from)[i]);
  }

  // Without speculative steps the heads say nothing: the record's first half is all.
  void write_row(uint32_t i) noexcept {
    tp_progress &copy = core_.progress(turn_ & 1, row_number(i));
    if (state_[i].spec_steps != 0)
      rewrite<sizeof(tp_progress)>(&copy, &state_[i]);
    else
      rewrite<offsetof(tp_progress, heads)>(&copy, &state_[i]);
  }

  void write_commit() noexcept { rewrite<sizeof(next_)>(&shared_.commit[turn_ & 1], &next_); }

  void write_frame(const tp_step *slot) noexcept {
    tp_frame &frame = core_.frame(k_, commit_.frames);
    constexpr uint32_t echoed = TP_STEP_NOT_NEED_STOP | TP_STEP_POOLING | TP_STEP_PROMPT |
                                TP_STEP_ACCEPT | TP_STEP_GAP | TP_STEP_MESSAGE_END;
    const auto n = static_cast<uint32_t>(out_.size());
    const uint32_t flags = slot ? slot->flags & echoed : 0;
    const bool pooling = flags & TP_STEP_POOLING;
    const uint32_t width = slot && (num_tokens_ != 0 || pooling) ? slot->width : 0;
    const FrameColumns to(n, pooling ? n : num_tokens_, width, num_drafts_, num_finals_,
                          core_.sizes.max_request_id_bytes, flags);
    frame.number = commit_.frames;
    frame.sequence = commit_.slots_done;
    frame.source_sequence = slot ? slot->source_sequence : commit_.next_source_sequence;
    frame.saved_ns = slot ? slot->saved_ns : 0;
    frame.published_ns = slot ? slot->published_ns : 0;
    frame.decoder = k_;
    frame.num_rows = n;
    frame.num_tokens = num_tokens_;
    frame.width = width;
    frame.num_finals = num_finals_;
    frame.num_drafts = num_drafts_;
    frame.num_firsts = num_firsts_;
    frame.step_rows = slot ? slot->num_rows : 0;
    frame.message_flag = slot ? slot->message_flag : uint32_t{TP_MESSAGE_TARGET};
    frame.has_slot = slot != nullptr;
    frame.flags = flags;
    frame.bytes = static_cast<uint32_t>(to.end);
    write_rows(frame, to);
    if (pooling)
      write_vectors(*slot, frame, to);
    else if (num_tokens_ != 0)
      write_tokens(*slot, frame, to);
    if (num_drafts_ != 0)
      write_drafts(*slot, frame, to);
    frame.committed_ns = now_ns();
    next_.frames += 1;
    if (slot) {
      const uint64_t saved =
          std::min(slot->saved_ns, slot->published_ns); // it is the engine's word
      count_value(shared_.saved_to_published, latency_bounds, slot->published_ns - saved);
      count_value(shared_.saved_to_committed, latency_bounds, frame.committed_ns - saved);
    }
  }

  void write_rows(tp_frame &frame, const FrameColumns &to) noexcept {
    auto *row = column<uint32_t>(frame, to.row),
         *generation = column<uint32_t>(frame, to.generation),
         *send_idx = column<uint32_t>(frame, to.send_idx),
         *offsets = column<uint32_t>(frame, to.token_offsets);
    auto *reasons = column<uint8_t>(frame, to.finish_reason);
    auto *first_token = column<uint64_t>(frame, to.first_token_ns);
    auto *finals = column<tp_final>(frame, to.finals);
    auto *ids = column<char>(frame, to.ids);
    uint32_t offset = 0, f = 0;
    for (uint32_t i = 0; i < out_.size(); ++i) {
      const Out &out = out_[i];
      row[i] = row_number(out.index);
      generation[i] = state_[out.index].generation;
      send_idx[i] = out.send_idx;
      offsets[i] = offset;
      reasons[i] = static_cast<uint8_t>(out.reason);
      first_token[i] = state_[out.index].first_token_ns;
      offset += out.num_tokens;
      if (!ends(out.reason))
        continue;
      const Row &r = rows_[out.index];
      const tp_progress &p = state_[out.index];
      tp_final &final = finals[f];
      final = {};
      final.index = i;
      final.id_bytes = r.id_bytes;
      final.num_tokens = p.emitted;
      final.prompt_tokens = r.prompt_tokens;
      final.arrival_ns = r.arrival_ns;
      final.first_token_ns = p.first_token_ns;
      final.last_token_ns = p.last_token_ns;
      final.spec_steps = p.spec_steps;
      std::copy(std::begin(p.heads), std::end(p.heads), final.heads);
      std::memcpy(ids + uint64_t{f} * core_.sizes.max_request_id_bytes, core_.id(row[i]),
                  r.id_bytes);
      ++f;
    }
    offsets[out_.size()] = offset;
  }

  // Neighbouring rows of the slot are neighbours in the frame, so whole runs are copied at once.
  void write_tokens(const tp_step &slot, tp_frame &frame, const FrameColumns &to) const noexcept {
    const StepColumns from(slot.num_rows, slot.num_tokens, slot.width, slot.flags);
    const uint64_t width = frame.width;
    uint64_t put_at = 0;
    for (size_t i = 0; i < out_.size();) {
      const uint64_t first = out_[i].first;
      uint64_t count = out_[i].num_tokens;
      for (++i; i < out_.size() && (out_[i].num_tokens == 0 || out_[i].first == first + count); ++i)
        count += out_[i].num_tokens;
      copy(frame, to.token_ids, slot, from.tokens, put_at, first, count);
      if (width != 0) {
        copy(frame, to.topk_ids, slot, from.topk_ids, put_at * width, first * width, count * width);
        copy(frame, to.topk_logprobs, slot, from.logprobs, put_at * width, first * width,
             count * width);
        copy(frame, to.ranks, slot, from.ranks, put_at, first, count);
      }
      put_at += count;
    }
  }

  // A final that a mark made has no vector: zeros, beside a reason that says so.
  void write_vectors(const tp_step &slot, tp_frame &frame, const FrameColumns &to) const noexcept {
    const StepColumns from(slot.num_rows, slot.num_tokens, slot.width, slot.flags);
    const uint64_t width = frame.width;
    for (size_t i = 0; i < out_.size(); ++i)
      if (rows_[out_[i].index].mark == TP_FINISH_NONE && out_[i].reason == TP_FINISH_STOP)
        copy(frame, to.topk_logprobs, slot, from.logprobs, i * width, out_[i].first * width, width);
      else
        std::memset(column<float>(frame, to.topk_logprobs) + i * width, 0, width * 4);
  }

  void write_drafts(const tp_step &slot, tp_frame &frame, const FrameColumns &to) const noexcept {
    const StepColumns from(slot.num_rows, slot.num_tokens, slot.width, slot.flags);
    auto *offsets = column<uint32_t>(frame, to.draft_offsets);
    uint32_t offset = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      offsets[i] = offset;
      copy(frame, to.draft_token_ids, slot, from.tokens, offset, out_[i].first, out_[i].num_drafts);
      offset += out_[i].num_drafts;
    }
    offsets[out_.size()] = offset;
  }

  static void copy(tp_frame &frame, uint64_t to, const tp_step &slot, uint64_t from,
                   uint64_t to_word, uint64_t from_word, uint64_t words) noexcept {
    std::memcpy(column<uint32_t>(frame, to) + to_word, column<uint32_t>(slot, from) + from_word,
                words * 4);
  }

  static constexpr uint32_t no_target = UINT32_MAX;

  const Core &core_;
  const uint32_t k_;
  tp_decoder &shared_;
  tp_role &role_;
  const tp_options options_;
  uint64_t turn_;
  tp_commit commit_; // as committed
  tp_commit next_{}; // of the turn in hand
  Consumer consumer_;
  std::vector<Row> rows_;
  std::vector<tp_progress> state_;
  PerRow<uint32_t> changed_, changed_before_;
  PerRow<Out> out_;
  Gap gaps_[TP_MAX_DRAFT_TOKENS + 1] = {}; // by how many tokens shared it
  uint32_t num_tokens_ = 0, num_finals_ = 0, num_drafts_ = 0, num_firsts_ = 0;
  bool has_news_ = false;
  bool has_marks_ = false; // a row's mark applies in this turn
  bool is_poison_ = false; // the next slot has killed this decoder twice
};

} // namespace tp
