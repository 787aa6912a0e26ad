/// Policy: the numbers that steer a tuner, in one place. None of them decides what is accepted: that is the paired
/// test's and the verifier's part. They decide what is tried, in which order and for how long.
#pragma once

namespace oxytorch::tune {

struct Policy {
  // -- what trials may take (SearchOptions::for_run()) --
  double trial_steps = 60;         ///< as given, whose time all trials together may take
  double least_trial_seconds = 3;  ///< for them, however short a step is: some trials and checks by the verifier
  double repay_steps = 240;        ///< trials may spend more where the saving so far repays all in so many steps
  double short_run_trials = 0.02;  ///< of the steps of a short run, for trials
  double short_run_repay = 0.03;   ///< of its steps, in which what was spent is to be repaid
  double likely_trials = 0.1;      ///< of the run as given, for trials of what is likely to repay them, beyond all that
  double conclude_steps = 50;      ///< that verifying and measuring what is kept usually takes
  double concluding_share = 0.1;   ///< of what would be saved in the planned run, for measuring it at the end
  double total_share = 0.15;       ///< of the planned run, for everything
  double least_total_seconds = 6;  ///< for everything, by accelerate()
  double least_trainer_seconds = 1;  ///< for everything, by a trainer at its first batch
  double again_share = 0.5;          ///< of what may be repaid, for what was on trial before

  // -- what one trial may take --
  double one_trial_share = 0.25;   ///< of the budget, so that a gain that is hard to measure leaves time for others
  double one_trial_steps = 40;     ///< where what is spent must be repaid soon: what shows only later saves less
  double one_trial_seconds = 0.3;  ///< that any trial may have: pairs of blocks of several short steps

  // -- where everything has to end in time --
  double reserved_steps = 200;  ///< at their fastest, kept back for verifying and measuring what is kept
  double reserved_share = 0.6;  ///< of the seconds for everything, at most
  double least_steps = 30;  ///< that all takes at the least: warming up, the baseline, a trial, a check of the numbers

  // -- what verifying usually takes, in steps as given --
  double verify_exact_steps = 50;
  double verify_steps = 90;  ///< of other kinds, whose losses are also held against those of other seeds and orders

  // -- what is likely to pay --
  double worth = 1.015;                 ///< a trial that will not show so much is given up: the next may save more
  double interplay = 1.6;               ///< what two strategies can make of each other at most
  double often_pays = 1.08;             ///< expected speedup from which what is exact and free is always tried
  double known_lead = 0.3;              ///< ranking bonus for gains that were measured before
  double clearly_faster = 1.1;          ///< by which an update leads by itself: inside of a step, caches differ
  double usual_optimizer_share = 0.15;  ///< of a step, where a strategy for optimizers has its expected speedup
  double hidden_share = 0.8;            ///< of drawing a batch and of a step, whichever is shorter, beside the other
  double likely_share = 0.25;           ///< of the run, in which a likely gain is to repay a one-off cost
  double trial_share = 0.5;             ///< of the run, in which it is to repay a trial
  double speaks_for = 1.1;              ///< a gain from which others of its group with one-off costs are tried too

  // -- with the goal memory --
  double uncounted_bytes = 1 << 20;  ///< that a faster step may take beside what `max_growth` allows
  double faster_share = 1.0 / 3;     ///< of the seconds for trials, at most, for what makes the step faster
  double smaller = 0.98;             ///< of the bytes of a step, below which what saves them is worth a trial

  double less_resident = 0.1;  ///< of those bytes as given, by which less of the process must stay in memory
  double resident_steps = 40;  ///< of those reserved, that measuring what leaves less of it there may take

  // -- what is remembered (reuse.h) --
  double least_difference = 0.2;  ///< by which the step as given may differ from what it was
  double spreads = 3;             ///< or by so many times what both measurements spread
  double nothing_days = 7;        ///< that nothing pays holds so long
  int nothing_reuses = 8;         ///< and so often
};

inline constexpr Policy kPolicy{};

}  // namespace oxytorch::tune
